"""The parts of runtime `ray`. Actors (`*_actor.py`) run in processes of Ray's, the others in the driver:

cluster      connects to Ray, or starts it        actors    starts actors, ahead of time or in a dead one's place
rollouts     rollout actors as one engine         rewards   reward actors as one function of a group
trainer      the trainer's actor as a trainer     staff     all of them, from their start to their end
reference    the reference's actor, where it is apart
"""
