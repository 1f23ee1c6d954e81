"""Choice of one of several replicas of the engine for each request."""
