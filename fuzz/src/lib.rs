//! Fuzz targets as functions, so that their corpora replay as ordinary tests.
