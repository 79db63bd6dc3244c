"""Simulated clusters: virtual ranks plan, save, commit and resume by the real code.

Messages and the store are in memory, time is virtual, and a seed decides faults and the order of
events. So a run of 64 ranks takes a second, and can be repeated:

>>> from holdfast.testing.cluster import Cluster, Faults, simulate
>>> cluster = Cluster(num_ranks=8, num_replicas=2)
>>> run = simulate(cluster, seed=7, faults=Faults(crash=0.002, lost=0.001), num_saves=2)
>>> run.violations
[]
"""

from holdfast.testing.cluster.network import Faults
from holdfast.testing.cluster.ranks import RankOutcome
from holdfast.testing.cluster.scale import SaveCosts, measure_saves
from holdfast.testing.cluster.simulation import Simulation, simulate
from holdfast.testing.cluster.state import Cluster

__all__ = [
    "Cluster",
    "Faults",
    "RankOutcome",
    "SaveCosts",
    "Simulation",
    "measure_saves",
    "simulate",
]
