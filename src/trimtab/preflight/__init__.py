"""`trimtab preflight`: is a pair of sampler and trainer fit to train?

engine_pair       sampler and trainer of one model, built from a recipe, and responses with the log-probs of both
checklist         the checks, and the result of all of them
weight_checks     the check that changed weights arrive in the sampler
preflight_page    the page
rescoring         `trimtab rescore`: a third implementation scores the ids of a dump
"""
