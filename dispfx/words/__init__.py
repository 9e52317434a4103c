"""What a user writes: MODEL, texts, devices, choices; checked before anything slow is imported."""
