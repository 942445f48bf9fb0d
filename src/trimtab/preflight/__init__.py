"""`trimtab preflight`: is a pair of sampler and trainer fit to train?"""
