"""Many processes: TensorFlow servers that hold the stages, and who minds them.

    supervisor -- starts, watches, replaces --> chief, and workers if they are
        |                                       on this machine
        '- asks for signs of life ---------.
    chief: the trainer itself --- gRPC --> workers: stages, their weights and
                                           slots

TensorFlow does all the transport. A chief that loses a worker cannot go on, so
the supervisor starts another, which resumes from the newest checkpoint.
"""
