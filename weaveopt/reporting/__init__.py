"""The report as text, JSON, trace and picture, and the answer to `--why`."""
