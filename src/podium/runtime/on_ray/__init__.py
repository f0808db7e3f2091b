"""The parts of runtime `ray`. Some classes run in Ray's actors (`*Actor`), the others in the driver:

calls     both ends of a call to an actor           cluster       connects to Ray, or starts it
actors    starts actors of one kind, finds those that a former driver left, and ends them
rollouts  rollout actors as one engine              rollout_actor one of them
rewards   reward actors as one function of a group  trainer       the trainer's and the reference's actors
run_actors  all actors of a run, from start to end
"""
