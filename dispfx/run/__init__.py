"""What a command does: open, read text, fit settings, learn, write."""
