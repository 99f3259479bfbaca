"""What weaveopt decides and predicts today, held in files so that a change of its inside can be told from a loss."""
