"""Parts of the learner of MuZero: what the model is to predict, and looking at stored steps anew."""
