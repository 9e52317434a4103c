"""The steps of a command: open, read text, fit settings, learn, write."""
