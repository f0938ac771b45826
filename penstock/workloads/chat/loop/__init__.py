"""The loop: what people say of a chat trains the next version, which is tried beside the one that answers.

    so many new labels ─► ratings ─► reward model ─► PPO ─► canary ─► promoted or withdrawn ─► the next labels

loop_state      where it stands, on the disk; what is asked of it
served_run      the run whose chat is made better: its settings, its registry, the version that answers
labels          what people have said that counts, and how much of it is new
step_process    a step as a process that ends with the loop
ensemble        heads that learn from halves of the thumbs, and where they disagree
served_judge    the newest reward model, kept and served
round_files     what steps leave for one another
loop_order      how the loop goes
weighing        what each criterion counts in the reward, as people change it
round_recipe    the training of a round, as a recipe
learning_loop   the loop, one step after the other
loop_view       what those who look after a chat see of it
"""
