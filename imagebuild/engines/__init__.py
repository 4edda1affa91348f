"""The engines that turn a recipe into something that can be served."""
