"""The user's arguments: MODEL, texts, devices, choices. Checked before slow imports."""
