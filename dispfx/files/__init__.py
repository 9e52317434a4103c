"""Files on disk: atomic writes, room, JSON text."""
