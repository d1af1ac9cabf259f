"""Pipeline-parallel training of giant networks on TensorFlow and Lingvo.

Data flows one way through the rooms of this package; a room imports only
those before it:

    layers -> cost -> partition, checkpointing -> plan -> schedule
                                              -> stage -> engine -> trainer

Importing the package imports neither TensorFlow nor Lingvo; it only makes sure
that Lingvo can be imported on systems where its native library cannot load.
"""

from lingvo_gpipe import lingvo_native

lingvo_native.install()
