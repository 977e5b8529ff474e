"""Classes with the names people know, thin over the engine, for code that is written around torch's own. Importing it imports torch."""
