"""Replicas of the server on Ray Serve. Nothing of Ray is imported unless `serve --replicas` is given."""
