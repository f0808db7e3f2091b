"""The parts of runtime `ray`. Classes named `*Actor` run in Ray's actors, the others in the driver.

cluster     connects to Ray, or starts it
actors      both ends of an actor and of calls to it, and groups of actors of one kind
models      the actors that hold a model: rollout workers as one engine, the trainer, a separate reference
rewards     reward actors as one function of a group
run_actors  all actors of a run, from start to end, and the stages made of them
"""
