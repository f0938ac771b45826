"""What training begins with: a small transformer that knows single steps, and thinks badly or not at all.

transformer       builds it
lessons           rows that it is taught with
warm_start        teaches it until its steps are right, then corrupts its thoughts
thoughts_start    makes it for a run, before its processes start
"""
