"""Code that several tests share: small cells and studies, fake devices, reference checks."""
