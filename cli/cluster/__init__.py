"""Replicas of the server on Ray Serve. Ray is imported only for `serve --replicas`."""
