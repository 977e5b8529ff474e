"""The ranks that train together: their groups, and who is missing when one does not come."""
