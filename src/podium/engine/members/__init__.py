"""The engines of a pool: their weights and answers, and the processes and servers that they run in."""
