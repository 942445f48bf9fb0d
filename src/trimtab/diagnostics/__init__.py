"""Reads run files and writes what people look at: the report of a run and the comparison of several."""
