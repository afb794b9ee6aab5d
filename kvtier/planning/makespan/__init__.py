"""What the seconds of a step are made of: `CostModel` (planning/costs.py) adds them up.

groups.py   layers that are alike
levels.py   what layers hold once the fullest spill, or the emptiest take something back
linear.py   `LinearPart`: what a step takes besides attention and waiting
overlap.py  how long the link is busy while the host attends, where layers are not alike
"""
