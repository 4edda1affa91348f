"""What deep probes saw, as tables for documents: no claims, so nothing here can fail a tree."""
