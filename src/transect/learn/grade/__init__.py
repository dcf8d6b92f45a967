"""The grader: runs a student's program in a process of its own, and compares what it returns.

In the grader's process:

* ``grader``   grades one program: right first, then fast
* ``compare``  compares a result with the exact one
* ``verdict``  the outcome, and its text for the student
* ``workshop`` starts the children, and holds the clock
* ``sandbox``  namespaces without network for programs of strangers

In the child's process:

* ``zygote``   has torch loaded, and forks a child for each program
* ``session``  loads one program and calls it
* ``watch``    sees which operators a program calls, and what it reaches for
* ``counting`` counts work; ``traffic.cpp`` counts that of C++
* ``compiling`` compiles kernels ahead of time

``wire`` has the messages between the two.
"""
