"""The cluster plane: discovery of engine pods, node and spot notices. Nothing of it is built yet."""
