"""Files of records: TFRecord and tf.train.Example."""
