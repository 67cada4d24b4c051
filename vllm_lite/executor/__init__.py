"""Execution of the engine's steps: the interface, the choice by configuration, worker processes, and a simulation."""
