"""The data side of training: from prompts to scored groups, synchronous or asynchronous."""
