"""How the files of trainers are laid out, and which component each part of them is."""
