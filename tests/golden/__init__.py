"""Golden files of what weaveopt decides and predicts, so that a refactoring can be distinguished from a regression."""
