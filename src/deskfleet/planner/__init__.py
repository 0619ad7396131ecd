"""What fits, why, and what to do about it: pure arithmetic, no torch, nothing is started.

Data flows one way: Inventory (a checkpoint) + Cluster (machines) + Wishes -> Layout -> RankBudget -> MemoryPlan.
"""
