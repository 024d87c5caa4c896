"""Shows a run in a browser: reads its files, asks its coordinator, and decides nothing itself."""
