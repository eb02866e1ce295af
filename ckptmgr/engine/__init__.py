"""The only code that touches devices, threads, clocks and storage."""
