"""What is wrong with a server that is garbled, slow, hanging or out of memory: an ordered ladder over facts."""
