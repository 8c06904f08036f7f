"""Where the models of a study come from: one class for each kind of source."""
