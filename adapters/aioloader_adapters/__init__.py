"""Adapters: sources that follow someone else's format or framework. Each is found by its entry point."""
