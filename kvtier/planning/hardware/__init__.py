"""What a machine takes for everything that a plan is made of, measured or estimated.

profile.py     `HardwareProfile`: what `calibrate` has measured, or an estimate
predictors.py  seconds by bytes, threads and tokens, fitted from measurements
machines.py    machines and models by their datasheets
model_size.py  a model's weights, KV and arithmetic, from its config
"""
