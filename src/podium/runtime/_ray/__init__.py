"""The parts of runtime `ray`. Actors (`*_actor.py`) run in Ray's processes and import no Ray; the others run in the
driver, beside the loop:

    cluster      connects to Ray, or starts it        actors    starts actors, ahead of time or in a dead one's place
    rollouts     rollout actors as one engine         rewards   reward actors as one function of a group
    trainer      the trainer's actor as a trainer     delivery  weights from the one to the others
"""
