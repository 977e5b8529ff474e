"""Where preprocessing runs: inline, in threads, in processes. All give the same results."""
