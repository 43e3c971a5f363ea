"""Parts of the MuZero learner: targets of the model, and reanalysis of stored steps."""
