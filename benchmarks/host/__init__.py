"""The time that the host needs."""
