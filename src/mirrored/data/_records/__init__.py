"""Reads and writes files of records: TFRecord and tf.train.Example."""
