"""What the bytes are (docs/format.md). Without torch: a dtype is a name here."""
