"""The tables behind the claims: every one is a list of ``handspan compare`` commands.

``python -m experiments NAME --data-folder data`` runs one, ``--show`` prints its commands.
"""
