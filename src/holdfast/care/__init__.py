"""What keeps a root healthy: preflight, verify, retention, gc. Without torch."""
