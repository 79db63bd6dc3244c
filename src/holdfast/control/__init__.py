"""Control of a running training from outside: signals, requests, and its exit."""
