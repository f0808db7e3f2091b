"""What runs inside the sandbox: a launcher, the tested program in a process of its own, and the judge of its answers.

Only the standard library is available there, nothing of Podium. These are the only files that execute code from data.
They import little, and nothing only for annotations, because each import costs milliseconds per sandbox.
"""
