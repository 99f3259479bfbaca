"""Golden files of what weaveopt decides and predicts, so that a refactoring can be told from a regression."""
