"""Runs whose processes are actors of a Ray cluster. Ray is optional and imported inside functions.

driver            starts the ranks and shows their events; the actor of a rank
actors            the connection, the resources of a run, calls and their errors
ray_transport     engines in actors, and weights through the object store
"""
